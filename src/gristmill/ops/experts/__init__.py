"""What ops over the experts of a mixture share: semantics, slots in order, routing, sums."""
