// Package transport declares how a consumer joins a group, reads its partitions and publishes records.
//
// Order: a member handles one generation at a time. It reads each partition in the order of its offsets, and one
// member of a group reads a partition at a time. Blocking: Join blocks until its context ends, and Fetch at most for
// the wait of the configuration and one request. Package transporttest checks this contract for every implementation.
package transport
