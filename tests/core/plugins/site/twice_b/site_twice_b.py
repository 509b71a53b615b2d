raise AssertionError("one of two plugins of one name must not be imported")
