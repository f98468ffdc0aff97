"""The report's page in a real browser. Apart from the other tests, as it needs a Chromium: make test-browser."""
