package doctor

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// support is the level of the support of a server or a platform.
type support string

const (
	tested      support = "tested"           // each run of the tests uses it
	expected    support = "expected to work" // it has the features that outrelay uses; the tests do not run on it
	untested    support = "untested"         // no test has used it, and it differs in a feature that outrelay relies on
	unsupported support = "unsupported"
)

// supported is one row of the support matrix, docs/support.md. The checks of the doctor judge by the same rows.
type supported struct {
	area, name string
	level      support
	why        string
}

// The areas of the matrix, in their order.
const (
	areaMongoDB  = "MongoDB"
	areaKafka    = "Kafka"
	areaPlatform = "Platform of the relay"
	areaGo       = "Go, for services that import packages"
)

// The versions that all tests run on. A test compares them with those of devstack and go.mod, and requires a recorded run of them.
const (
	testedMongoDB = "6.0.5"
	testedKafka   = "4.3.0"
	testedGo      = "1.26"
)

// The major versions of MongoDB that are expected to work.
const (
	oldestMongoDB = 6
	newestMongoDB = 8
)

// Names of rows that checks use.
const (
	mongoSharded   = "sharded cluster, through mongos"
	kafkaConfluent = "Confluent Cloud"
	kafkaMSK       = "Amazon MSK"
	kafkaEventHubs = "Azure Event Hubs"
	kafkaRedpanda  = "Redpanda"
)

var matrix = slices.Concat(
	[]supported{{areaMongoDB, testedMongoDB + ", replica set of one or three members", tested, "all tests run on it"}},
	rowsOfRuns(readRuns(), areaMongoDB, testedMongoDB, mongoRow),
	otherMongoDB,
	[]supported{{areaKafka, "Apache Kafka " + testedKafka + ", KRaft, one or three brokers", tested, "all tests run on it; also logins by SASL with a password and with a token, TLS and ACLs"}},
	rowsOfRuns(readRuns(), areaKafka, testedKafka, kafkaRow),
	otherKafka,
	platforms,
)

// otherMongoDB, otherKafka and platforms are the rows that no recorded run decides.
var otherMongoDB = []supported{
	{areaMongoDB, "other versions from 6.0 to 8.x, replica set", expected, "outrelay uses only features of 6.0: change streams with their wall clock, transactions, and majority concerns. MongoDB ended the support of 6.0 on 2025-07-31: use 7.0 or 8.0 for new installations"},
	{areaMongoDB, "MongoDB Atlas, dedicated cluster", expected, "a replica set; the tests do not reach one"},
	{areaMongoDB, "newer than 8.x", untested, "not released when this version was made"},
	{areaMongoDB, mongoSharded, untested, "the outbox, its transactions and the order across shards have never been tested there"},
	{areaMongoDB, "before 6.0", unsupported, "its change streams lack the options that the relay needs"},
	{areaMongoDB, "standalone server", unsupported, "it has neither change streams nor transactions"},
	{areaMongoDB, "Amazon DocumentDB, Azure Cosmos DB, FerretDB", unsupported, "their change streams lack the options that the relay needs, or do not exist"},
}

var otherKafka = []supported{
	{areaKafka, "other versions of Apache Kafka from 3.0 on", expected, "the relay negotiates the version of each request"},
	{areaKafka, kafkaConfluent, expected, "Apache Kafka as a service; the tests do not reach it"},
	{areaKafka, kafkaMSK, expected, "Apache Kafka as a service; the tests check only the signed token of the login"},
	{areaKafka, kafkaRedpanda, untested, "another implementation of transactional ids and their fencing"},
	{areaKafka, kafkaEventHubs, untested, "another implementation of transactional ids and their fencing"},
	{areaKafka, "before 3.0", unsupported, "no test has used it; before 0.11 there are no idempotent producers"},
}

var platforms = []supported{
	{areaPlatform, "linux/amd64", tested, "all tests run on it"},
	{areaPlatform, "linux/arm64", expected, "released, not tested"},
	{areaPlatform, "darwin/amd64", expected, "released, not tested"},
	{areaPlatform, "darwin/arm64", expected, "released, not tested"},
	{areaPlatform, "windows/amd64", expected, "released, not tested; no reload by a signal"},
	{areaPlatform, "windows/arm64", expected, "released, not tested; no reload by a signal"},
	{areaPlatform, "others", untested, "no release is built for them"},

	{areaGo, testedGo, tested, "go.mod requires it"},
	{areaGo, "newer than " + testedGo, expected, "the promise of Go 1"},
	{areaGo, "before " + testedGo, unsupported, "the library of Prometheus requires " + testedGo},
	{areaGo, "the MongoDB driver of go.mod", tested, "go mod tidy in a new module takes the newest one, which is expected to work"},
}

// rowOf returns the row with this name. Without one it is the row of others in the area.
func rowOf(area, name string) supported {
	var others supported
	for _, r := range matrix {
		if r.area == area && r.name == name {
			return r
		}
		if r.area == area && r.name == "others" {
			others = r
		}
	}
	return others
}

// judge returns the finding about a server or platform of this level: a warning if it is neither tested nor expected to work.
func judge(level support, why, format string, args ...any) finding {
	text := fmt.Sprintf(format, args...)
	switch level {
	case tested:
		return passed("%s, tested", text)
	case expected:
		return passed("%s, expected to work", text)
	}
	return warned("test your use of it before you rely on it; docs/support.md lists the tested versions", "%s is %s: %s", text, level, why)
}

// judgeMongoDB judges a version of the server.
func judgeMongoDB(version string) finding {
	if supported := rowOf(areaMongoDB, version+recordedMongoDB); supported.name != "" {
		return judge(supported.level, supported.why, "MongoDB %s", version)
	}

	major := majorOf(version)
	switch {
	case version == testedMongoDB:
		return judge(tested, "", "MongoDB %s", version)
	case major > 0 && major < oldestMongoDB:
		return failed(fmt.Sprintf("upgrade MongoDB to %d.0 or later", oldestMongoDB), "MongoDB %s", version)
	case major > 0 && major <= newestMongoDB:
		return judge(expected, "", "MongoDB %s (tested: %s)", version, testedMongoDB)
	}
	return judge(untested, fmt.Sprintf("this version of outrelay was made for %d.0 to %d.x", oldestMongoDB, newestMongoDB), "MongoDB %s", version)
}

// majorOf returns the number of the major release of a version of MongoDB, or 0 if it has none.
func majorOf(version string) int {
	head, _, _ := strings.Cut(version, ".")
	major, _ := strconv.Atoi(head)
	return major
}

// managedKafka names the service that a broker belongs to, by the end of its host name.
var managedKafka = []struct{ suffix, name string }{
	{".confluent.cloud", kafkaConfluent},
	{".amazonaws.com", kafkaMSK},
	{".servicebus.windows.net", kafkaEventHubs},
	{".redpanda.com", kafkaRedpanda},
}

// kafkaService returns the row of the service that the brokers belong to. It reports false for other brokers.
func kafkaService(brokers []string) (supported, bool) {
	for _, b := range brokers {
		host, _, err := net.SplitHostPort(b)
		if err != nil {
			host = b
		}
		for _, m := range managedKafka {
			if strings.HasSuffix(strings.ToLower(host), m.suffix) {
				return rowOf(areaKafka, m.name), true
			}
		}
	}
	return supported{}, false
}

func (configChecks) checkPlatform(context.Context) finding {
	platform := runtime.GOOS + "/" + runtime.GOARCH
	supported := rowOf(areaPlatform, platform)
	return judge(supported.level, supported.why, "%s", platform)
}
