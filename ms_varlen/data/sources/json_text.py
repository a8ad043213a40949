"""What is wrong with a JSON text, in words that a reader of data rather than of Python understands."""

import json


def json_fault(error: ValueError | RecursionError) -> str:
    """What `json.loads` found, for an error message.

    Args:
        error: what it raised for a text.
    """
    if isinstance(error, json.JSONDecodeError) and error.lineno == 1:
        return f"{error.msg} at character {error.pos}"  # "line 1" would contradict the number of a line of a file
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return str(error)
    if isinstance(error, RecursionError):
        return "arrays or objects nested too deeply"
    return "an integer of more digits than can be read"  # Python's limit, 4300: the only other fault that it has
