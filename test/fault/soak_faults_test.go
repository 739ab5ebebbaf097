//go:build unix

package fault

import (
	"context"
	"os"
	"slices"
	"strconv"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

// relayFaults are possible with all servers.
func relayFaults() []fault {
	return []fault{
		{"the owner is killed", func(e *era) { e.removeRelay(e.owner()).Kill(); e.startTwo() }},
		{"all relays are killed", func(e *era) { e.killAll(); e.startTwo() }},
		{"an owner dies at a crash point", (*era).dieAtPoint},
		{"the owner is frozen", (*era).freezeOwner},
		{"a relay leaves, and another joins", (*era).replaceRelay},
		{"a topic appears", (*era).createLate},
		{"a topic grows", (*era).growTopic},
		{"a tenant comes and goes, twice", (*era).visitTenant},
		{"a dead letter is requeued", (*era).requeueLetter},
		{"a consumer is killed", (*era).killConsumer},
	}
}

// longFaultsOfRelays take too long for the run of every day.
func longFaultsOfRelays() []fault {
	return []fault{
		{"a topic is deleted and created again", (*era).recreateTopic},
		{"the clock of the owner steps", (*era).stepClock},
	}
}

func mongoNetworkFaults() []fault {
	return networkFaults("MongoDB", func(s *site) *toxiproxy.Proxy { return s.mongo })
}

func kafkaNetworkFaults() []fault {
	return networkFaults("Kafka", func(s *site) *toxiproxy.Proxy { return s.kafka })
}

func networkFaults(to string, proxy func(*site) *toxiproxy.Proxy) []fault {
	return []fault{
		{"connections to " + to + " are cut", func(e *era) {
			p := proxy(e.site)
			listen := p.Listen
			p.Stop()
			e.during(500*time.Millisecond, 4*time.Second)
			p.Listen = listen
			mustSucceed(e.t, p.Start())
		}},
		{to + " is silent", func(e *era) {
			heal := addToxic(e.t, proxy(e.site), `{"name":"hole","type":"timeout","stream":"downstream","attributes":{"timeout":0}}`)
			e.during(500*time.Millisecond, 4*time.Second)
			heal()
		}},
		{to + " is slow", func(e *era) {
			heal := addToxic(e.t, proxy(e.site), `{"name":"slow","type":"latency","stream":"downstream","attributes":{"latency":150,"jitter":50}}`)
			e.during(time.Second, 4*time.Second)
			heal()
		}},
	}
}

func clusterFaults() []fault {
	return []fault{
		{"the primary steps down", (*era).stepDown},
		{"the primary is killed", func(e *era) { e.killForSomeTime(e.primary()); e.primary() }},
		{"the primary is frozen", func(e *era) { e.freezeForSomeTime(e.primary()); e.primary() }},
		{"a broker is killed", func(e *era) { e.killForSomeTime(e.anyBroker()) }},
		{"a broker is frozen", func(e *era) { e.freezeForSomeTime(e.anyBroker()) }},
	}
}

func smallFaults(hasDisk bool) []fault {
	list := []fault{
		{"MongoDB is killed", func(e *era) { e.killForSomeTime(e.site.stack.Mongods()[0]); e.primary() }},
		{"Kafka is killed", func(e *era) { e.killForSomeTime(e.anyBroker()) }},
		{"the history is lost", (*era).loseHistory},
	}
	if hasDisk {
		list = append(list,
			fault{"the disk is full", (*era).fillDisk},
			fault{"the disk stands still", (*era).freezeDisk},
			fault{"the disk is slow", (*era).slowDisk},
		)
	}
	return list
}

// during lets a fault of the servers or the network last for some time. Half of the times a relay dies or freezes in the middle of it.
func (e *era) during(least, most time.Duration) {
	e.t.Helper()
	e.wait(least/2, most/2)
	inner := []fault{
		{"nothing", func(*era) {}},
		{"nothing", func(*era) {}},
		{"a relay is killed", func(e *era) { e.removeRelay(e.anyRelay()).Kill(); e.startTwo() }},
		{"an owner dies at a crash point", (*era).dieAtPoint},
	}[e.random.IntN(4)]

	e.t.Logf("in the middle of it: %s", inner.name)
	inner.do(e)
	e.wait(least/2, most/2)
}

// removeRelay takes a relay off the list.
func (e *era) removeRelay(p *kit.Process) *kit.Process {
	e.relays = slices.DeleteFunc(e.relays, func(other *kit.Process) bool { return other == p })
	return p
}

func (e *era) killAll() {
	for _, p := range e.relays {
		p.Kill()
	}
	e.relays = nil
}

// startTwo starts relays until there is an owner and a standby.
func (e *era) startTwo() {
	for len(e.relays) < 2 {
		e.relays = append(e.relays, e.StartRelay())
	}
}

// dieAtPoint lets an owner die at one of the crash points, if it comes there.
func (e *era) dieAtPoint() {
	e.killAll()
	point := points[e.random.IntN(len(points))]
	p := e.StartCrashing(point)
	e.t.Logf("%s: reached %v", point, p.KilledByCrashPoint(5*time.Second))
	e.startTwo()
}

// freezeOwner stops the owner for longer than its lease.
func (e *era) freezeOwner() {
	p := e.owner()
	p.Freeze()
	e.wait(2500*time.Millisecond, 4*time.Second)
	p.Continue()
}

func (e *era) replaceRelay() {
	e.relays = append(e.relays, e.StartRelay())
	e.wait(100*time.Millisecond, 2*time.Second)
	p := e.removeRelay(e.anyRelay())
	// On a busy machine, the new one may not have begun to listen to signals.
	p.WaitForLog("outrelay starts")
	p.Terminate()
	if code := p.WaitExit(); code != 0 {
		e.t.Errorf("%s: exit code %d after SIGTERM", p.Node, code)
	}
}

// createLate creates the topic that was missing, once.
func (e *era) createLate() {
	if !slices.Contains(e.types, "late") {
		e.CreateTopic("late", 3, e.site.replicas)
		e.types = append(e.types, "late")
	}
}

func (e *era) growTopic() {
	e.GrowTopic("grown", 1)
	for range 8 {
		e.AppendEvents(e.Outbox(), kit.NewEvent("grown", e.newKey("grown-"), 1, 100))
	}
}

// visitTenant creates a database with an outbox, and drops it after its event was delivered. Then another one gets its name.
func (e *era) visitTenant() {
	db := e.Client.Database(e.newKey(e.Prefix + "-tenant"))
	for range 2 {
		sent := kit.NewEvent("tenant", e.newKey("tenant-"), 1, 60)
		e.AppendEvents(db.Collection("outbox"), sent)
		e.awaitRecord(e.topics, sent)
		mustSucceed(e.t, db.Drop(e.t.Context()))
	}
}

// narrowBytes is the max.message.bytes of the topic "narrow". An operator raises it to wideBytes.
const narrowBytes, wideBytes = "4000", "1000000"

// requeueLetter appends an event that is too large for its topic, raises the limit, and requeues the dead letter.
func (e *era) requeueLetter() {
	sent := kit.NewEvent("narrow", e.newKey("narrow-"), 1, 20<<10)
	e.AppendEvents(e.Outbox(), sent)
	e.eventually("the dead letter of "+sent.Key(), func() bool {
		return e.CountState("letters", bson.D{{Key: "id", Value: event.ParseID(sent.ID().String())}}) == 1
	})

	// As long as the relay has the old limit, the event becomes a dead letter again.
	e.SetTopicConfig("narrow", "max.message.bytes", wideBytes)
	e.eventually("the delivery of "+sent.Key(), func() bool {
		if code, out, errOut := e.RunCommand("dead", "requeue", "--topic", e.TopicOf("narrow"), "--yes"); code != 0 {
			e.t.Logf("dead requeue: %d\n%s%s", code, out, errOut)
		}
		for _, r := range e.topics.AllRecords() {
			if r.Header("id") == sent.ID().String() {
				return true
			}
		}
		return false
	})
	e.SetTopicConfig("narrow", "max.message.bytes", narrowBytes)
}

func (e *era) killConsumer() {
	i := e.random.IntN(len(e.hands))
	e.hands[i].Kill()
	if i == len(e.hands)-1 {
		e.hands[i] = e.sagas.StartMember()
		e.sagas.WaitServing(e.hands[i])
		return
	}
	e.hands[i] = e.crew.StartMember()
	e.crew.WaitServing(e.hands[:2]...)
}

// recreateTopic deletes a topic whose event was delivered. An event that is appended after that waits, and arrives in the topic
// that is created again. Events that Kafka has acknowledged go with their topic, unless another relay takes over before the position has
// passed them: it sends them again.
func (e *era) recreateTopic() {
	kind := e.newKey("passing")
	e.CreateTopic(kind, 1, e.site.replicas)

	for number := 1; number <= 2; number++ {
		sent := kit.NewEvent(kind, kind, number, 60)
		mustSucceed(e.t, e.box.Transaction(e.t.Context(), func(ctx context.Context) error { return e.box.Append(ctx, sent) }))
		if number == 2 {
			e.eventually("an event waits for the deleted topic", func() bool { return e.CountState("waiting", bson.D{{Key: "key", Value: kind}}) > 0 })
			e.CreateTopic(kind, 1, e.site.replicas)
		}

		// A client cannot read on in a topic that was created again.
		topics := e.ReadTopics(kind)
		e.awaitRecord(topics, sent)
		topics.WaitForEnd()
		all := topics.AllRecords()
		if last := all[len(all)-1]; len(all) > number || last.Header("id") != sent.ID().String() {
			e.t.Errorf("%s has %d records, and event %d is not the last", e.TopicOf(kind), len(all), number)
		}
		if number == 1 {
			e.DeleteTopic(kind)
		}
	}
}

// stepClock lets the wall clock of a new owner jump by hours while it works.
func (e *era) stepClock() {
	step := time.Duration(1+e.random.IntN(48)) * time.Hour
	if e.random.IntN(2) == 0 {
		step = -step
	}

	kit.BinaryWithStep(e.t)
	e.killAll()
	e.t.Logf("by %s", step)
	p := e.StartRelayWithStep(4*time.Second, step)
	e.relays = []*kit.Process{p}
	p.WaitTookOver()
	e.eventually("the clock has stepped", func() bool { return time.Until(p.ReadClock().Add(-step)).Abs() < time.Minute })
	e.wait(time.Second, 3*time.Second)
	e.startTwo()
}

func (e *era) primary() *devstack.Member {
	ctx, cancel := context.WithTimeout(e.t.Context(), kit.Patience)
	defer cancel()
	p, err := e.site.stack.Primary(ctx)
	mustSucceed(e.t, err)
	return p
}

func (e *era) anyBroker() *devstack.Member {
	all := e.site.stack.Kafkas()
	return all[e.random.IntN(len(all))]
}

// stepDown lets the members of the replica set elect another primary.
func (e *era) stepDown() {
	command := bson.D{{Key: "replSetStepDown", Value: 5}, {Key: "secondaryCatchUpPeriodSecs", Value: 4}}
	// The server responds, or closes the connection.
	if err := e.Client.Database("admin").RunCommand(e.t.Context(), command).Err(); err != nil {
		e.t.Logf("stepping down: %v", err)
	}
	e.primary()
}

// killForSomeTime kills a server, and starts it again later.
func (e *era) killForSomeTime(server *devstack.Member) {
	mustSucceed(e.t, server.Kill())
	e.during(time.Second, 8*time.Second)
	e.restart(server)
}

func (e *era) restart(server *devstack.Member) {
	ctx, cancel := context.WithTimeout(e.t.Context(), kit.Patience)
	defer cancel()
	mustSucceed(e.t, server.Restart(ctx))
}

func (e *era) freezeForSomeTime(server *devstack.Member) {
	mustSucceed(e.t, server.Pause())
	e.during(time.Second, 8*time.Second)
	mustSucceed(e.t, server.Resume())
}

// loseHistory lets the oplog roll over while no relay runs. Half of the times the first owner dies in the sweep.
func (e *era) loseHistory() {
	e.killAll()
	rollOverOplog(e.t, e.Scene, operationTime(e.t, e.Scene))
	var owners []*kit.Process
	if e.random.IntN(2) == 0 {
		dying := e.StartCrashing("mid-sweep:" + strconv.Itoa(1+e.random.IntN(500)))
		e.t.Logf("dies in the sweep: %v", dying.KilledByCrashPoint(20*time.Second))
		owners = append(owners, dying)
	}

	p := e.StartRelay()
	e.relays = []*kit.Process{p}
	owners = append(owners, p)
	// A sweep of few envelopes ends before the crash point.
	e.eventually("the gap is closed", func() bool {
		return slices.ContainsFunc(owners, func(owner *kit.Process) bool { return owner.HasLogged("the gap is closed") })
	})
	e.startTwo()
}

// fillDisk fills the disk of the servers. They end, or hang. When there is room again, an operator restarts them.
func (e *era) fillDisk() {
	ballast := e.site.fillDisk(e.t)
	e.during(time.Second, 6*time.Second)
	mustSucceed(e.t, os.Remove(ballast))
	e.restart(e.site.stack.Mongods()[0])
	e.restart(e.anyBroker())
	e.primary()
}

// freezeDisk blocks the disk of the servers. Then everything that waited is written.
func (e *era) freezeDisk() {
	e.site.freezeDisk(e.t, func() { e.during(time.Second, 8*time.Second) })
}

// slowDisk blocks the disk of the servers most of the time.
func (e *era) slowDisk() {
	for until := time.Now().Add(time.Duration(4+e.random.IntN(5)) * time.Second); time.Now().Before(until); {
		e.site.freezeDisk(e.t, func() { e.wait(100*time.Millisecond, 400*time.Millisecond) })
		e.wait(10*time.Millisecond, 100*time.Millisecond)
	}
}
