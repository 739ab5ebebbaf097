// Package kafkaconnect runs Kafka Connect with the connector of another publisher on this machine: for comparisons with
// it, and for tests that move from it. Maven fetches both on the first use; they stay in the cache of devstack.
package kafkaconnect
