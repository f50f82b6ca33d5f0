"""What a run trains beside its gradients: optimizers, schedules, random numbers; and what is kept of it all."""
