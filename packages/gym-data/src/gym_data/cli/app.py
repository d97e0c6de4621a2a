"""`gym data`: look at data sets and change them."""

from __future__ import annotations

from cyclopts import App

from gym_data.cli import change, look
from gym_data.cli.bench import bench

app: App = App(
    name="gym data", help="Look at data sets and change them; every command counts its rows.", version_flags=[]
)

app.command(look.inspect)
app.command(look.validate)
app.command(look.stats)
app.command(look.preview)
app.command(bench)
app.command(change.convert)
app.command(change.split)
app.command(change.dedup)
app.command(change.decontaminate)
app.command(change.pii)
