"""Learning rules: gradients through past inputs, shared by the trainers and the online learner."""
