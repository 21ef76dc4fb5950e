"""One suite for every frontend: ``test_behaviours.py`` asks, an adapter per frontend answers."""
