// Package member is a service on the other side of Kafka as scenarios and tests need one: a process of a consumer group
// whose every effect is written down, so that what was promised of effects can be judged from the database alone, whatever
// became of the processes.
//
// A member of role Effects handles orders: for each it counts up its key's counter and inserts one effect with the number
// that the counter then has, in the handler's transaction. A member of role Saga takes each message as a step of a saga,
// which keeps the steps in its state and emits an event for each. Members also write down which generations of the group
// they were in, and a few counts, outside of transactions; of those a kill loses what is younger than a fifth of a second.
//
// Run ends when its context does, after at most a few seconds. Judging reads all effects or sagas at once.
package member
