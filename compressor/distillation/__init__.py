"""Teach a student what a teacher knows: losses, teachers (live, cached), students (derived, quantized), the loop."""
