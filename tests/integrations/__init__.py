"""Trainers of other projects: the losses, parameters and files of one device."""
