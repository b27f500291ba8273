"""The figures of the Lancet paper (MLSys 2024, section 7), again by simulation: `lancet reproduce`."""
