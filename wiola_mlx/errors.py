"""The one error for what a user can mend: its text is a single line that says what to do."""


class WiolaError(ValueError):
    pass
