"""`python -m evenkeel report`: one HTML file about one run or several, their figures as PNG, their numbers as CSV.

    command.py      the options and their checks; writes the files; --csv
    history.py      a run's files, read line by line: curves, attempts, checkpoints and evaluations
    classified.py   predictions/SET.json: the confusion matrix, accuracy by class, the most wrong images
    media.py        media/: pictures and tables that the job has logged
    ranks.py        ranks.jsonl: how far apart the ranks are
    audited.py      audit.json: what `evenkeel audit` has found
    figures.py      the figures, by matplotlib; long curves thinned out and smoothed
    theme.py        colours and style of figures; a figure as SVG that follows the page from light to dark
    page.py         the sections of a report and the figures in them; the page around them is `cli/html_page.py`'s

A new figure is a function in `figures.py` that returns a `Figure`, and a place for it in `page.py`; colours come from
`theme.LIGHT`. The style sheet is `assets/page.css`. matplotlib is imported only when a report is made.

The page loads nothing and runs no script. Names from users are escaped, and secret options are not in the files that it
is made from. It needs only the run's folder, not the data.

Nothing imports this folder but `__main__.py` and tests, so it may be deleted with `tests/cli/report`,
`tests/processes/test_report.py` and docs/report.md.

Not here: what a run records (`run/`), active runs as a table (`cli/status.py`).
"""
