// Package consumer takes the events of Kafka topics to handlers, each event's effect exactly once per handler.
package consumer
