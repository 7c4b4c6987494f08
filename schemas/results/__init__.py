"""Results that steps hand to each other, a file per subject; base.py has what all results share."""
