//go:build unix

package kit

import (
	"context"
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/demo/member"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// Crew makes a group of members that handle what the scene's relay delivers of an aggregate type; nobody runs yet.
func (s *Scene) Crew(role member.Role, aggregateType string) *Crew {
	s.tb.Helper()
	if err := member.Prepare(s.tb.Context(), s.DB); err != nil {
		s.tb.Fatal(err)
	}
	uri, _ := s.config["mongodb"].(map[string]any)["uri"].(string)
	return &Crew{scene: s, Spec: member.Spec{
		Role: role, MongoDB: uri, Database: s.DB.Name(), Brokers: s.Brokers, Topics: []string{s.Topic(aggregateType)}, Group: s.Prefix,
	}}
}

// Crew is a consumer group of processes.
type Crew struct {
	Spec  member.Spec // of those that join from now on, but for its name
	scene *Scene
	n     int
}

// Join starts one more process; it does not wait.
func (c *Crew) Join() *Process {
	c.scene.tb.Helper()
	c.n++
	spec := c.Spec
	spec.Name = fmt.Sprintf("m%d", c.n)
	return Launch(c.scene.tb, spec.Name, Binary(c.scene.tb, ""), nil, member.Command, spec.Arg())
}

// Serving waits until these processes share the partitions.
func (c *Crew) Serving(all ...*Process) {
	c.scene.tb.Helper()
	var names []string
	for _, p := range all {
		names = append(names, p.Node)
	}
	Eventually(c.scene.tb, strings.Join(names, " and ")+" share the partitions", func() bool {
		yes, err := member.Serving(c.scene.tb.Context(), c.scene.DB, names...)
		return err == nil && yes
	})
}

// Leave asks processes to leave the group and waits until they are gone.
func (c *Crew) Leave(all ...*Process) {
	c.scene.tb.Helper()
	for _, p := range all {
		p.Term()
	}
	for _, p := range all {
		if code := p.Wait(); code != 0 {
			c.scene.tb.Errorf("%s: exit code %d after SIGTERM", p.Node, code)
		}
	}
}

// Effects waits until there are effects for n events.
func (c *Crew) Effects(n int) {
	c.scene.tb.Helper()
	c.counted(n, "effects", member.CountEffects)
}

// Steps waits until sagas have taken n steps.
func (c *Crew) Steps(n int) {
	c.scene.tb.Helper()
	c.counted(n, "steps", member.CountSteps)
}

// counted waits until there are n of something, as long as there come more.
func (c *Crew) counted(n int, what string, count func(context.Context, *mongo.Database) (int, error)) {
	c.scene.tb.Helper()
	for got := 0; got < n; {
		before := got
		Eventually(c.scene.tb, fmt.Sprintf("%d %s (%d so far)", n, what, got), func() bool {
			now, err := count(c.scene.tb.Context(), c.scene.DB)
			if err == nil {
				got = now
			}
			return got >= n || got > before
		})
	}
}

// CheckNothingDead finds messages that the group gave up.
func (c *Crew) CheckNothingDead() {
	c.scene.tb.Helper()
	n, err := c.scene.DB.Collection(consumer.DefaultLetters).CountDocuments(c.scene.tb.Context(), bson.D{})
	if err != nil || n > 0 {
		c.scene.tb.Errorf("%d dead letters of the group, %v", n, err)
	}
}
