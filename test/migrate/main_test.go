//go:build unix

package migrate

import (
	"flag"
	"testing"

	"github.com/outrelay/outrelay/test/kit"
)

// The flag enables the tests with other publishers, which Maven and npm fetch (about 70 MB).
var _ = flag.Bool("migrate.peers", false, "move real Debezium, MongoDB Kafka connector and outbox-event-bus to outrelay; needs a JDK with Maven, and Node with npm")

func TestMain(m *testing.M) { kit.MainBeside(m) }
