"""Learning rules: how past inputs get credit, shared by the trainers and the online learner."""
