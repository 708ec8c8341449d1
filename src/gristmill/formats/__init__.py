"""Number formats as pure tensor maths: encode, decode, pack, swizzle. Knows no op."""
