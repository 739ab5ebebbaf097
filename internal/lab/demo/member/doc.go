// Package member is a sample consumer service for scenarios and tests: a process of a consumer
// group that stores each of its effects. So the database alone shows whether every effect happened
// once, even if processes were killed.
//
// A member with the role Effects handles orders. For each order it increments the counter of the
// key and inserts one effect with the new number, in the handler's transaction. A member with the
// role Saga handles each message as a step of a saga, which keeps the steps in its state and emits
// an event for each. Members also store the generations of the group that they joined, and a few
// counts, outside of transactions. A kill loses the counts of the last 200 ms.
//
// Run returns a few seconds after the end of its context at the latest. Judging reads all effects
// or sagas at once.
package member
