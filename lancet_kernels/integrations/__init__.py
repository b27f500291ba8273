"""Entries into other libraries. Importing one of these modules imports its library and registers there."""
