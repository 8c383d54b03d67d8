"""Integer grids and the algorithms that choose codes on them; pure tensor maths."""
