//go:build unix

package kit

import (
	"context"
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/demo/member"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// NewCrew returns a consumer group for the events of an aggregate type. No member runs yet. Each crew of a scene has its own role.
func (s *Scene) NewCrew(role member.Role, aggregateType string) *Crew {
	s.tb.Helper()
	if !s.prepared {
		if err := member.Prepare(s.tb.Context(), s.DB); err != nil {
			s.tb.Fatal(err)
		}
		s.prepared = true
	}
	uri, _ := s.config["mongodb"].(map[string]any)["uri"].(string)
	return &Crew{scene: s, Spec: member.Spec{
		Role: role, MongoDB: uri, Database: s.DB.Name(), Brokers: s.Brokers, Topics: []string{s.TopicOf(aggregateType)}, Group: s.Prefix + "-" + string(role),
	}}
}

// Crew is a consumer group whose members are processes.
type Crew struct {
	Spec  member.Spec // of the members that start from now on, without the name
	scene *Scene
}

// StartMember starts one more process and returns at once.
func (c *Crew) StartMember() *Process {
	c.scene.tb.Helper()
	c.scene.members++
	spec := c.Spec
	spec.Name = fmt.Sprintf("m%d", c.scene.members)
	return Launch(c.scene.tb, spec.Name, Binary(c.scene.tb), nil, member.Command, spec.Arg())
}

// WaitServing waits until these processes share the partitions.
func (c *Crew) WaitServing(all ...*Process) {
	c.scene.tb.Helper()
	var names []string
	for _, p := range all {
		names = append(names, p.Node)
	}
	stacktest.Eventually(c.scene.tb, strings.Join(names, " and ")+" share the partitions", func() bool {
		yes, err := member.Serving(c.scene.tb.Context(), c.scene.DB, names...)
		return err == nil && yes
	})
}

// StopMembers sends SIGTERM to processes and waits until they have ended.
func (c *Crew) StopMembers(all ...*Process) {
	c.scene.tb.Helper()
	for _, p := range all {
		p.Terminate()
	}
	for _, p := range all {
		if code := p.WaitExit(); code != 0 {
			c.scene.tb.Errorf("%s: exit code %d after SIGTERM", p.Node, code)
		}
	}
}

// WaitEffects waits until n events have had their effect.
func (c *Crew) WaitEffects(n int) {
	c.scene.tb.Helper()
	c.waitCount(n, "effects", member.CountEffects)
}

// WaitSteps waits until sagas have taken n steps.
func (c *Crew) WaitSteps(n int) {
	c.scene.tb.Helper()
	c.waitCount(n, "steps", member.CountSteps)
}

// waitCount waits until count returns at least n. The time limit applies to each increase.
func (c *Crew) waitCount(n int, what string, count func(context.Context, *mongo.Database) (int, error)) {
	c.scene.tb.Helper()
	for got := 0; got < n; {
		before := got
		stacktest.Eventually(c.scene.tb, fmt.Sprintf("%d %s (%d so far)", n, what, got), func() bool {
			now, err := count(c.scene.tb.Context(), c.scene.DB)
			if err == nil {
				got = now
			}
			return got >= n || got > before
		})
	}
}

// CheckNothingDead fails the test if the group has dead letters.
func (c *Crew) CheckNothingDead() {
	c.scene.tb.Helper()
	n, err := c.scene.DB.Collection(deadletter.DefaultCollection).CountDocuments(c.scene.tb.Context(), bson.D{})
	if err != nil || n > 0 {
		c.scene.tb.Errorf("the group has %d dead letters, want 0 (%v)", n, err)
	}
}
