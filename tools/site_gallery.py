"""The pages of the gallery."""


def pages() -> dict[str, str]:
    return {}
