"""Products of two thin matrices in place of one weight; pure tensor maths."""
