package devstack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// The images of the last resort.
const (
	mongoImage = "mongo:7"
	kafkaImage = "apache/kafka:" + kafkaVersion
)

func imageTag(image string) string { return image[strings.LastIndexByte(image, ':')+1:] }

// dockerImage is nil if an engine answers and has the image, which is pulled if it is missing.
// A container sees its own loopback only, so members of a set of three could not reach each other.
func dockerImage(ctx context.Context, image string, members int, what string, report func(Progress)) error {
	if members > 1 {
		return fmt.Errorf("gives single members, %d were asked for", members)
	}
	if _, err := exec.LookPath("docker"); err != nil {
		return errors.New("no docker on the PATH")
	}
	if _, err := shortRun(ctx, "docker", "version", "--format", "{{.Server.Version}}"); err != nil {
		return fmt.Errorf("no engine answers: %w", err)
	}
	if _, err := shortRun(ctx, "docker", "image", "inspect", image); err == nil {
		return nil
	}
	defer ticking(report, Progress{What: what, Stage: Fetching, Detail: "image " + image + ", once"}, func() float64 { return 0 })()
	if out, err := interruptible(ctx, "docker", "pull", "-q", image).CombinedOutput(); err != nil {
		return fmt.Errorf("pulling %s: %w", image, addLastLine(err, string(out)))
	}
	return nil
}

// containerLaunch says how a member is run as a container that publishes the member's own ports.
func (s *Stack) containerLaunch(m *Member, image string, env map[string]string, command []string) func(*os.File) (instance, error) {
	name := fmt.Sprintf("outrelay-%s-%d", m.name, m.ports[0])
	args := []string{"run", "-d", "--name", name, "--label", "outrelay.devstack"}
	for _, p := range m.ports {
		args = append(args, "-p", fmt.Sprintf("127.0.0.1:%d:%d", p, p))
	}
	for _, k := range sortedKeys(env) {
		args = append(args, "-e", k+"="+env[k])
	}
	args = append(append(args, image), command...)
	made := false
	return func(log *os.File) (instance, error) {
		if made {
			args = []string{"start", name}
		} else {
			s.guard.container(name)
		}
		if err := runDocker(args...); err != nil {
			return nil, err
		}
		made = true
		return followContainer(name, log)
	}
}

// kafkaEnv writes broker properties as the image takes them.
func kafkaEnv(props map[string]string, cluster string) map[string]string {
	env := map[string]string{"CLUSTER_ID": cluster}
	for k, v := range props {
		k = strings.NewReplacer("_", "__", "-", "___", ".", "_").Replace(k)
		env["KAFKA_"+strings.ToUpper(k)] = v
	}
	return env
}

// container is a member that runs in Docker.
type container struct {
	name  string
	ended chan struct{}
}

// followContainer copies the container's log to the member's and notices its end.
func followContainer(name string, log *os.File) (instance, error) {
	cmd := exec.Command("docker", "logs", "-f", name)
	cmd.Stdout, cmd.Stderr = log, log
	wait := exec.Command("docker", "wait", name)
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	if err := wait.Start(); err != nil {
		_ = cmd.Process.Kill()
		return nil, errors.Join(err, cmd.Wait())
	}
	c := &container{name, make(chan struct{})}
	go func() {
		defer close(c.ended)
		_ = wait.Wait()
		_ = cmd.Wait()
	}()
	return c, nil
}

func (c *container) pid() int              { return 0 }
func (c *container) kill() error           { return runDocker("kill", c.name) }
func (c *container) pause() error          { return runDocker("pause", c.name) }
func (c *container) resume() error         { return runDocker("unpause", c.name) }
func (c *container) terminate() error      { return runDocker("stop", c.name) }
func (c *container) done() <-chan struct{} { return c.ended }

func runDocker(args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if out, err := exec.CommandContext(ctx, "docker", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("docker %s: %w", args[0], addLastLine(err, string(out)))
	}
	return nil
}
