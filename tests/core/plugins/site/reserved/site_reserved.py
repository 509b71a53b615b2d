raise AssertionError("a plugin with a reserved name must not be imported")
