"""What is optimised: one small class a method."""
