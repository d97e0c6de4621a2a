"""Measurements on the machine at hand, with the usual ways of doing it beside Gym's."""
