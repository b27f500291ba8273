"""The training graph: captured with torch, then plain data: instructions, tensors, partition rules, costs."""
