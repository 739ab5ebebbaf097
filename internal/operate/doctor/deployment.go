package doctor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
)

// The bounds of a sound deployment.
const (
	shortOplog  = time.Hour       // below, a restart can lose the place
	purgeMargin = 5 * time.Minute // M of N25
	skewWarned  = time.Second     // between this machine and the server
	usualRetain = 24 * time.Hour  // where envelopes are never purged
)

func (x mongoChecks) checkVersion(ctx context.Context) finding {
	var info struct {
		Version  string   `bson:"version"`
		FerretDB bson.Raw `bson:"ferretdb"`
	}
	if err := x.mongo.runAdminCommand(ctx, bson.D{{Key: "buildInfo", Value: 1}}, &info); err != nil {
		return unchecked("", "buildInfo failed: %v", err)
	}

	if info.FerretDB != nil {
		return failed(fmt.Sprintf("use MongoDB %d.0 or later", oldestMongoDB),
			"the server is FerretDB (compatible with MongoDB %s), which has no change streams", info.Version)
	}

	// A server that was upgraded keeps the features of its earlier version until an administrator confirms the upgrade. If the user may not
	// read parameters, another check has that finding.
	var parameter struct {
		FCV struct {
			Version string `bson:"version"`
		} `bson:"featureCompatibilityVersion"`
	}
	err := x.mongo.getParameter(ctx, "featureCompatibilityVersion", &parameter)
	if features := parameter.FCV.Version; err == nil && majorOf(features) < oldestMongoDB && features != "" {
		release := fmt.Sprintf("%d.0", majorOf(info.Version))
		return failed(fmt.Sprintf("run in mongosh: db.adminCommand({setFeatureCompatibilityVersion: %q})", release),
			"MongoDB %s has the feature compatibility version %s, with which the relay cannot create indexes or purge", info.Version, features)
	}
	return judgeMongoDB(info.Version)
}

func (x mongoChecks) checkReplicaSet(context.Context) finding {
	response := x.mongo.hello
	members := len(response.Hosts) + len(response.Passives)
	switch {
	case response.mongos():
		supported := rowOf(areaMongoDB, mongoSharded)
		return judge(supported.level, supported.why, "a %s,", supported.name)
	case response.Ghost:
		return failed(initiateCommand(x.mongo.opts.Hosts[0]),
			"mongod was started with --replSet, but the replica set was never initiated")
	case response.SetName == "":
		return explainStandalone(x.mongo.opts.Hosts[0])
	case response.Primary == "":
		return failed("run in mongosh: rs.status()\na majority of the members has to be up",
			"replica set %s has no primary", response.SetName)
	case members == 1:
		return warned("add members in mongosh: rs.add(\"host:27017\"), up to three", "replica set %s has one member",
			response.SetName)
	}

	return passed("replica set %s of %d members, primary %s", response.SetName, members, response.Primary)
}

func (x mongoChecks) checkArbiters(context.Context) finding {
	response := x.mongo.hello
	switch {
	case response.mongos():
		return passed("mongos does not show the members of the shards; run rs.status() on each shard")
	case len(response.Arbiters) > 0:
		return warned(fmt.Sprintf("replace the arbiter by a member with data, in mongosh: rs.remove(%q); rs.add(\"host:27017\")", response.Arbiters[0]),
			"%d members are arbiters (%s)", len(response.Arbiters), joinFew(response.Arbiters, 3))
	}
	return passed("no arbiters")
}

func (x mongoChecks) checkClock(ctx context.Context) finding {
	var best, skew time.Duration
	// The shortest of three round trips gives the most exact difference.
	for i := range 3 {
		var response helloResponse
		sent := time.Now()
		if err := x.mongo.runAdminCommand(ctx, bson.D{{Key: "hello", Value: 1}}, &response); err != nil {
			return unchecked("", "reading the server's time failed: %v", err)
		}

		// The time is read once: a pause of the process between two reads would count as skew.
		got := time.Now()
		if trip := got.Sub(sent); i == 0 || trip < best {
			// The server has read its clock about half a trip before the response arrived.
			best, skew = trip, response.LocalTime.Sub(got)+trip/2
		}
	}

	if skew.Abs() > skewWarned+best {
		way := "ahead of"
		if skew < 0 {
			way = "behind"
		}
		return warned("synchronize both clocks by NTP: timedatectl set-ntp true",
			"the server's clock is %v %s this machine's", skew.Abs().Round(100*time.Millisecond), way)
	}

	return passed("the clocks differ by less than %v",
		max(skew.Abs(), best).Truncate(time.Millisecond)+time.Millisecond)
}

// checkTransactions compares the server's longest transaction with the purge's margin. N25
func (x mongoChecks) checkTransactions(ctx context.Context) finding {
	const name = "transactionLifetimeLimitSeconds"
	var response struct {
		Limit int `bson:"transactionLifetimeLimitSeconds"`
	}
	err := x.mongo.getParameter(ctx, name, &response)
	switch {
	case mongodb.HasCode(err, mongodb.CodeUnauthorized):
		return unchecked(x.mongo.access.grantCluster("getParameter"),
			"the user lacks the action getParameter on the cluster, so %s cannot be read; its default is 60", name)
	case err != nil && x.mongo.hello.mongos():
		return unchecked("", "mongos does not return %s, because it is a parameter of the shards; its default is 60", name)
	case err != nil:
		return unchecked("", "reading %s failed: %v", name, err)
	}

	most := int(purgeMargin.Seconds()) / 2
	if response.Limit > most {
		return failed(fmt.Sprintf("db.adminCommand({setParameter: 1, %s: %d}), and the same in the configuration of each mongod", name, most),
			"%s is %d; the purge is safe up to %d", name, response.Limit, most)
	}
	return passed("%s is %d; the purge is safe up to %d", name, response.Limit, most)
}

// checkOplog judges how long a relay may be away. A young set has a short oplog that is not full: that alone is no fault.
func (x mongoChecks) checkOplog(ctx context.Context) finding {
	if x.mongo.hello.mongos() {
		return unchecked("",
			"each shard has its own oplog, which mongos does not show; run rs.printReplicationInfo() on each shard")
	}

	oplog, err := changes.ReadOplog(ctx, x.mongo.client)
	switch {
	case errors.Is(err, changes.ErrNotAllowed):
		return unchecked(x.mongo.access.grantCluster("serverStatus"), "the user lacks the action serverStatus, so the time window of the oplog cannot be read")
	case errors.Is(err, changes.ErrNoOplog):
		return unchecked("", "the server does not return the time window of the oplog")
	case err != nil:
		return unchecked("", "%v", err)
	}

	// A young oplog is short, but it will keep at least its configured retention.
	window := max(oplog.Window(), oplog.Retention)
	wanted := x.cfg.Retention
	if wanted == 0 {
		wanted = usualRetain
	}
	return judgeOplog(window, wanted, oplog.Whole)
}

// judgeOplog judges the window of the oplog. whole means that nothing was cut off the oplog since the server started.
func judgeOplog(window, wanted time.Duration, whole bool) finding {
	hours := wanted.Hours()
	fix := fmt.Sprintf("db.adminCommand({replSetResizeOplog: 1, minRetentionHours: %.4g}) on each member, or with "+
		"size: Double(<MB>)", hours)
	switch {
	case window >= wanted:
		return passed("the oplog covers %s, retention is %s", formatHours(window), formatHours(wanted))
	case whole:
		return passed("the oplog covers %s, since the server started; its time window is known when the oplog is full", formatHours(window))
	case window < shortOplog:
		return failed(fix, "the oplog covers only %s", formatHours(window))
	}

	return warned(fix, "the oplog covers %s, less than the retention of %s", formatHours(window),
		formatHours(wanted))
}

func formatHours(duration time.Duration) string {
	if duration >= 48*time.Hour {
		return fmt.Sprintf("%.0f h", duration.Hours())
	}
	if duration >= time.Hour {
		return fmt.Sprintf("%.1f h", duration.Hours())
	}
	return duration.Round(time.Second).String()
}

func (x mongoChecks) checkWriteConcern(ctx context.Context) finding {
	const fix = "write events with w:majority, as pkg/outbox does in Transaction\n" +
		"db.adminCommand({setDefaultRWConcern: 1, defaultWriteConcern: {w: \"majority\"}}), and remove w=1 from mongodb.uri and from the addresses of the services"
	slow := ""
	if response := x.mongo.hello; len(response.Hosts) == 1 && !response.mongos() {
		slow = "; on a set of one member the relay sees such an event up to 100 ms later, after the journal is written"
	}
	if wc := x.mongo.opts.WriteConcern; wc != nil && wc.W != nil {
		if wc.W != "majority" {
			return warned(fix, "mongodb.uri sets w:%v%s", wc.W, slow)
		}

		return passed("mongodb.uri sets w:majority")
	}

	var response struct {
		Default struct {
			W any `bson:"w"`
		} `bson:"defaultWriteConcern"`
	}
	err := x.mongo.runAdminCommand(ctx, bson.D{{Key: "getDefaultRWConcern", Value: 1}}, &response)
	switch {
	case err != nil && len(x.mongo.hello.Arbiters) > 0:
		return warned(fix, "the cluster's default cannot be read; with arbiters it is w:1%s", slow)
	case err != nil:
		return passed("the cluster's default cannot be read; without arbiters it is w:majority unless it was changed")
	case response.Default.W != nil && response.Default.W != "majority":
		return warned(fix, "the cluster's default is w:%v%s", response.Default.W, slow)
	case response.Default.W == nil:
		return warned(fix, "the cluster has no default of w:majority%s", slow)
	}

	return passed("the cluster's default is w:majority")
}
