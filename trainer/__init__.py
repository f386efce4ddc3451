"""From a dataset and its oracle to a trained model, on Torch."""
