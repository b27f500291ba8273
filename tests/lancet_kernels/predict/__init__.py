"""A package: a file of the same name tests `schedules.time.simulate`."""
