package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/offline"
)

// kafkaChecks check the brokers and the transactional id.
type kafkaChecks struct{ *examination }

func (x kafkaChecks) checkKafka(ctx context.Context) finding {
	call, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	err := x.brokers.Diagnose(call)
	if err == nil {
		text := strings.Join(x.cfg.Kafka.Brokers, ",") + " responds"
		if supported, known := kafkaService(x.cfg.Kafka.Brokers); known {
			return judge(supported.level, supported.why, "%s; %s", text, supported.name)
		}
		return passed("%s", text)
	}

	// The errors of the brokers are then those of the interruption.
	if call.Err() != nil {
		return failed("correct kafka.brokers, or allow the connection in firewalls and network policies",
			"no broker responds in time at %s", x.brokers)
	}

	said, fixes := splitDiagnoses(err)
	if len(said) == 0 {
		return failed("check kafka in the configuration", "%v", err)
	}
	finding := failed(joinLines(fixes, 3), "%s", joinFew(said, 3))
	// A relay that starts does not wait for a problem that only a change of the configuration ends.
	finding.lasting = x.isLasting(call, err)
	return finding
}

// splitDiagnoses returns the texts and fixes of a joined error of several brokers.
func splitDiagnoses(err error) (said, fixes []string) {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, one := range many.Unwrap() {
			moreTexts, moreFixes := splitDiagnoses(one)
			said, fixes = append(said, moreTexts...), append(fixes, moreFixes...)
		}

		slices.Sort(fixes)
		return said, slices.Compact(fixes)
	}

	if diagnosis, ok := errors.AsType[*kafkawire.Diagnosis](err); ok {
		return []string{fmt.Sprintf("%s: %s (tried %s)", diagnosis.Broker, diagnosis.Text, diagnosis.Tried)}, []string{diagnosis.Fix}
	}
	return nil, nil
}

func (x kafkaChecks) checkBrokers(ctx context.Context) finding {
	layout, err := x.brokers.Metadata(ctx, nil)
	if err != nil {
		return unchecked("", "Kafka returns: %v", err)
	}
	n := len(layout.Brokers)
	x.topics.brokers = n
	if n == 1 {
		return warned("add brokers, up to three, and raise the replication factor of the topics",
			"the cluster has one broker")
	}
	return passed("%d brokers", n)
}

// brokerSettings returns the settings of each broker that this user may read, by the broker's id.
func (x kafkaChecks) brokerSettings(ctx context.Context, names ...string) map[int32]map[string]string {
	call, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	out := map[int32]map[string]string{}
	layout, err := x.brokers.Metadata(call, nil)
	if err != nil {
		return out
	}
	for id := range layout.Brokers {
		// A broker that does not respond must not hide the settings of the others.
		if got, err := x.brokers.DescribeBroker(call, id, names); err == nil {
			out[id] = got
		}
	}
	return out
}

// checkRequestSize compares the largest request that brokers accept with that of the relay.
func (x kafkaChecks) checkRequestSize(ctx context.Context) finding {
	const setting = "socket.request.max.bytes"
	most := max(kafkawire.MaxRequestBytes, int(x.cfg.Limits.Record)+recordOverhead)
	known := false
	var small []string
	for id, got := range x.brokerSettings(ctx, setting) {
		n, err := strconv.Atoi(got[setting])
		known = known || err == nil
		if err == nil && n < most {
			small = append(small, fmt.Sprintf("%d on broker %d", n, id))
		}
	}

	slices.Sort(small)
	switch {
	case len(small) > 0:
		return warned(fmt.Sprintf("set %s of the brokers to at least %d and restart them; Kafka's default is 104857600", setting, most),
			"%s is %s, and a request of the relay may have %d bytes", setting, joinFew(small, namesMost), most)
	case !known:
		// The relay needs no such privilege, and few clusters lower the setting.
		return passed("not known: the user lacks DESCRIBE_CONFIGS on the cluster; a request of the relay has at most %d bytes", most)
	}
	return passed("at least %d bytes", most)
}

// coordinatorFix returns the fix of a coordinator of transactions that does not respond. Kafka creates the topic of the coordinators
// only when it has enough brokers for the configured replicas.
func (x kafkaChecks) coordinatorFix(ctx context.Context) string {
	const factor, minISR = "transaction.state.log.replication.factor", "transaction.state.log.min.isr"
	for id, got := range x.brokerSettings(ctx, factor, minISR) {
		for _, name := range []string{factor, minISR} {
			if n, err := strconv.Atoi(got[name]); err == nil && x.topics.brokers > 0 && n > x.topics.brokers {
				return fmt.Sprintf("%s is %d on broker %d, and the cluster has %d: add brokers, or lower %s and %s of the brokers and restart them",
					name, n, id, x.topics.brokers, factor, minISR)
			}
		}
	}
	return fmt.Sprintf("check the brokers: the topic __transaction_state needs a leader for each partition, and as many in-sync replicas as %s; "+
		"Kafka creates it only with as many brokers as %s", minISR, factor)
}

// checkTransactionalID uses an id of the doctor with the prefix that the ACL must allow, because the id
// of the relay is in use. All runs for one watcher share this id, so that ids do not accumulate.
func (x kafkaChecks) checkTransactionalID(ctx context.Context) finding {
	id := "outrelay.doctor." + x.cfg.Watcher
	call, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	err := offline.TryTransactionalID(call, x.brokers, id)
	switch {
	case errors.Is(err, offline.ErrIDForbidden):
		return failed(fmt.Sprintf("kafka-acls.sh %s --add --allow-principal %s --operation WRITE --operation DESCRIBE --transactional-id outrelay. --resource-pattern-type prefixed", x.bootstrapFlag(), connect.Principal(x.cfg)),
			"missing: WRITE or DESCRIBE on transactional ids that begin with outrelay.")
	case err != nil:
		return failed(x.coordinatorFix(ctx), "initializing the transactional id %s failed: %v", id, err)
	}

	return passed("the user may use ids that begin with outrelay.")
}

func (x *examination) bootstrapFlag() string {
	return "--bootstrap-server " + strings.Join(x.cfg.Kafka.Brokers, ",")
}
