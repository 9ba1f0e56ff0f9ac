"""Fixed markup of the report's page: frame, style sheet, and notes on what is not protected."""

# The policy lets a browser load nothing: no script, no font, no image from elsewhere.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light">
<title>Private prediction: report</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<h1>Private next-token prediction</h1>
<p class="lead">This report shows what answers from an ensemble of private models cost in privacy
and gain in quality. It is for the operator of the models: not every number here may be
published.</p>
<p>{run}</p>
</header>
{sections}
</main>
</body>
</html>
"""

STYLE = """\
:root { --ink: #1c1e21; --soft: #5b6068; --line: #dcdfe3; --tint: #f6f7f8; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff; font: 16px/1.55 system-ui, -apple-system,
  "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .9rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line); }
.lead { font-size: 1.05rem; color: var(--soft); margin: 0; max-width: 42rem; }
.small { font-size: .85rem; color: var(--soft); margin: .6rem 0 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .45rem; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: baseline; }
thead th { border-bottom: 2px solid var(--ink); font-size: .8rem; line-height: 1.3;
  vertical-align: bottom; }
thead + tbody td:first-child { font-weight: 600; overflow-wrap: break-word; max-width: 14rem; }
.number { text-align: right; }
td.number { white-space: nowrap; }
.settings { width: auto; min-width: 60%; }
.settings th { font-weight: 500; color: var(--soft); white-space: nowrap; padding-left: 0; }
.settings td { overflow-wrap: anywhere; }
.badge { display: inline-block; padding: .05rem .5rem; border-radius: 1rem; font-size: .78rem;
  font-weight: 600; line-height: 1.35; border: 1px solid currentColor; }
td .badge { font-size: .75rem; white-space: nowrap; }
.badge.public { color: #3d4852; background: #eef1f4; }
.badge.fixed { color: #00563f; background: #e0f3ec; }
.badge.ex-post { color: #004a75; background: #e1eff8; }
.badge.published { color: #7a4300; background: #fdf0da; }
.badge.none { color: #8f2d00; background: #fbe6dc; }
dl { margin: 0; }
.guarantees dt { font-weight: 600; }
.guarantees dd { margin: .2rem 0 1.1rem; max-width: 48rem; }
figure { margin: 0 0 2rem; max-width: 46rem; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { font-size: .88rem; color: var(--soft); margin-top: .4rem; max-width: 44rem; }
.sample { margin: .5rem 0; padding: .9rem 1.1rem; background: var(--tint);
  border-left: 4px solid #0072b2; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .9rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.sample .prompt { color: var(--soft); }
ul { padding-left: 1.2rem; max-width: 48rem; }
li { margin-bottom: .45rem; }
@media print { body { font-size: 11pt; } main { max-width: none; padding: 0; }
  h2, dt { break-after: avoid; } .scroll { overflow: visible; }
  table { font-size: 8pt; } thead th, td .badge { font-size: 7pt; } th, td { padding: .3rem; }
  .badge, .sample { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

UNPROTECTED_NOTES = (
    "The mixing weights λ, a data-dependent ε(D), perplexities and all log-probabilities of the "
    "mixture depend on the private data and have no protection of their own. They are for the "
    "operator only. Only the sampled answers may be released.",
    "Do not publish a data-dependent, ex-post ε, and let nothing that outsiders can see depend on "
    "it. A fixed ε may be published.",
    "The unit is the one that each guarantee names: one shard, all the text that one model was "
    "fine-tuned on, or everything of one name with a shard of its own. Text that occurs in several "
    "shards is not covered at the ε of one shard. The public model’s own training data is not "
    "covered at all.",
    "Each guarantee covers the answers that it names, of one accountant. Answers of other "
    "accountants add to its cost.",
    "Seeded randomness is for evaluation only, because anyone who knows or guesses the seed can "
    "repeat the draws. Answers to others need the secure generator.",
    "Answers drawn without protection have no guarantee. The claim of the published bound is no "
    "guarantee either, because the bound is invalid.",
)
"""What the guarantees leave out, in sentences without markup."""
