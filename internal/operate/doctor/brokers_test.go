//go:build unix

package doctor

import (
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// A broker's own settings can prevent the work of the relay. The doctor names the setting: Kafka closes the connection of a request that
// is too large, and returns only "coordinator not available" if it cannot create the topic of the coordinators.
func TestSettingsOfBrokers(t *testing.T) {
	t.Parallel()
	s := stacktest.Own(t, devstack.Options{Brokers: 1, Quick: true, Kafka: devstack.KafkaOptions{Props: map[string]string{
		"socket.request.max.bytes":                 "2000000",
		"transaction.state.log.replication.factor": "3",
		"transaction.state.log.min.isr":            "2",
	}}})
	_, db := newShop(t, "x")
	r := examine(t, loadConfig(t, stacktest.MongoURI(t), s.Brokers(), newSettings(t, db)...))
	expectCheck(t, r, "kafka.request_size", Warn, "socket.request.max.bytes is 2000000 on broker", "a request of the relay may have 8392704 bytes",
		"to at least 8392704")
	expectCheck(t, r, "kafka.transactional_id", Fail, "transaction.state.log.replication.factor is 3 on broker", "the cluster has 1",
		"transaction.state.log.min.isr")

	r = examine(t, loadConfig(t, stacktest.MongoURI(t), s.Brokers(), newSettings(t, db, "limits.record=1MiB")...))
	expectCheck(t, r, "kafka.request_size", Warn, "a request of the relay may have 4194304 bytes")

	r = examine(t, loadConfig(t, stacktest.MongoURI(t), stacktest.Brokers(t), newSettings(t, db)...))
	expectCheck(t, r, "kafka.request_size", OK, "at least 8392704 bytes")
	if c := findCheck(t, r, "kafka.transactional_id"); c.Status != OK || strings.Contains(c.Detail, "coordinator") {
		t.Errorf("%+v", c)
	}
}
