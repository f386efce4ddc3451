"""The controller: a pure state machine of pools."""
