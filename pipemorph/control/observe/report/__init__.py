"""What of an observed job its host has not been told, and the reports made of it."""
