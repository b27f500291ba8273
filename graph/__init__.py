"""The training graph as plain data: instructions, tensors, partition rules, costs. No torch inside."""
