"""SMT: the recurrent network whose memory is a set of tokens, and its teacher."""
