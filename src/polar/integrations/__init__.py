"""Other trainers, a module each: what they take of Polar are its traces, and nothing in Polar takes anything of them."""
