"""How far the picked kernel is from the best there is."""
