package devstack

// checkOwned returns nil: the temporary directory of Windows belongs to one user.
func checkOwned(string) error { return nil }
