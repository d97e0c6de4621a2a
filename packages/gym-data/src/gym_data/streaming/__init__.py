"""Rows read and encoded while a run trains, with an exact place to go on from."""
