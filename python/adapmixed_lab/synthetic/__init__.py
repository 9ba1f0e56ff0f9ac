"""How like the records synthetic texts are, and what they tell of single records."""
