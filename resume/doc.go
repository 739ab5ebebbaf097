// Package resume defines positions in a MongoDB change stream: the resume token, and the position that consists of a token and its
// cluster time. The relay stores its own position with it.
//
// The package does no I/O and starts no goroutine. To compare or decode a token takes one pass over its few dozen bytes.
//
// Order: a position means that everything up to it is done. Positions of one deployment are totally ordered. Tokens of different
// deployments cannot be compared. The server may reject a token that looks valid, because only the server can check whether it
// still has the history.
package resume
