"""How long an update takes on 1 to 512 cards, calculated: docs/scale.md shows it."""
