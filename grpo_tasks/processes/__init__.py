"""Child processes: started, supervised, spoken to, and ended with whoever started them."""
