"""Generated flight-booking conversations: private text whose secrets are all known.

Templates in the manner of AirDialogue are filled with random names, airports, dates and prices. No
network is needed. The planted booking number stands after `SAID_AS`.
"""

from __future__ import annotations

import random

from adapmixed.data.builtin import Document

SAID_AS = "Your booking number is "

_NAMES = (
    "Alice", "Brian", "Carla", "Daniel", "Elena", "Frank", "Grace", "Hugo", "Irene", "Jacob",
    "Laura", "Martin", "Nadia", "Oscar", "Paula", "Ruben", "Sofia", "Thomas", "Vera", "Walter",
)  # fmt: skip
_SURNAMES = (
    "Adams", "Brooks", "Chen", "Diaz", "Evans", "Fischer", "Garcia", "Hughes", "Ivanov", "Jones",
    "Kim", "Lopez", "Moore", "Nolan", "Okafor", "Perez", "Reyes", "Silva", "Turner", "Weber",
)  # fmt: skip
_AIRPORTS = (
    "ATL", "AUS", "BOS", "CLT", "DCA", "DEN", "DFW", "DTW", "EWR", "HOU", "IAD", "IAH", "JFK",
    "LAS", "LAX", "LGA", "MCO", "MIA", "MSP", "OAK", "ORD", "PHL", "PHX", "SEA", "SFO",
)  # fmt: skip
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
_GREETINGS = ("Hello", "Hi", "Good morning", "Good evening")
_WISHES = (
    "Please book the flight from {origin} to {target} on {date}.",
    "I need a flight from {origin} to {target} on {date}.",
    "Is there a flight from {origin} to {target} on {date}? I would like to take it.",
)
_OFFERS = ("It is {price} dollars.", "That is {price} dollars.", "It costs {price} dollars.")


def flight_dialogue(customer: str, booking: str, *, seed: int) -> Document:
    """Return a conversation in which a customer books a flight, one line for each turn.

    Args:
        customer: the document's identifier.
        booking: the number that the agent gives after `SAID_AS`. It changes nothing else: all the
            rest is a function of (customer, seed).
        seed: any integer.
    """
    draw = random.Random(f"{seed}/{customer}")
    origin, target = draw.sample(_AIRPORTS, 2)
    date = f"{draw.choice(_MONTHS)} {draw.randrange(1, 29)}"
    wish = draw.choice(_WISHES).format(origin=origin, target=target, date=date)
    offer = draw.choice(_OFFERS).format(price=draw.randrange(12, 80) * 10)
    name = f"{draw.choice(_NAMES)} {draw.choice(_SURNAMES)}"
    text = (
        f"Customer: {draw.choice(_GREETINGS)}, I am {name}. {wish}\n"
        f"Agent: {offer} {SAID_AS}{booking}.\n"
    )
    return Document(customer, text)
