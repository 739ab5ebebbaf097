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

// The images that are used if no program is available, the same as in compose.yaml.
const (
	mongoImage = "mongo:7.0.39@sha256:9bdaeb6dac6e7e762e84e2f84103d1f9bb078fa1ba6bde8bb9d2274f655ad173"
	kafkaImage = "apache/kafka:" + KafkaVersion + "@sha256:0be4c9eb3565733612d2836d65636fd611a219ebcf5b4162e5ac259ea0ecb907"
)

// imageName returns the name and the tag of an image, without its digest.
func imageName(image string) string { return strings.SplitN(image, "@", 2)[0] }

func imageTag(image string) string {
	name := imageName(image)
	return name[strings.LastIndexByte(name, ':')+1:]
}

// dockerImage returns nil if an engine responds and has the image. It pulls a missing image. It returns an error for
// several members: a container has its own loopback, so the members could not reach each other.
func dockerImage(ctx context.Context, image string, members int, what string, report func(Progress)) error {
	if members > 1 {
		return fmt.Errorf("supports only single members, not %d", members)
	}

	if _, err := exec.LookPath("docker"); err != nil {
		return errors.New("no docker on the PATH")
	}
	if _, err := shortRun(ctx, "docker", "version", "--format", "{{.Server.Version}}"); err != nil {
		return fmt.Errorf("no engine responds: %w", err)
	}
	if _, err := shortRun(ctx, "docker", "image", "inspect", image); err == nil {
		return nil
	}

	fetching := Progress{What: what, Stage: Fetching, Detail: "image " + imageName(image) + ", once"}
	stop := startTicking(report, fetching, func() float64 { return 0 })
	defer stop()
	if out, err := interruptible(ctx, "docker", "pull", "-q", image).CombinedOutput(); err != nil {
		return fmt.Errorf("pulling %s: %w", image, addLastLine(err, string(out)))
	}
	return nil
}

// containerLaunch returns the function that starts a member as a container. The container publishes the member's
// ports.
func (s *Stack) containerLaunch(
	member *Member, image string, env map[string]string, command []string,
) func(*os.File) (instance, error) {
	name := fmt.Sprintf("outrelay-%s-%d", member.name, member.ports[0])
	args := []string{"run", "-d", "--name", name, "--label", "outrelay.devstack"}
	for _, p := range member.ports {
		args = append(args, "-p", fmt.Sprintf("127.0.0.1:%d:%d", p, p))
	}
	for _, k := range sortedKeys(env) {
		args = append(args, "-e", k+"="+env[k])
	}
	args = append(append(args, image), command...)

	// The first call creates the container. Later ones start it again, on the same data.
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

// kafkaEnv returns broker properties as environment variables of the image.
func kafkaEnv(props map[string]string, cluster string) map[string]string {
	env := map[string]string{"CLUSTER_ID": cluster}
	for k, v := range props {
		k = strings.NewReplacer("_", "__", "-", "___", ".", "_").Replace(k)
		env["KAFKA_"+strings.ToUpper(k)] = v
	}
	return env
}

// container is an instance that runs in Docker.
type container struct {
	name  string
	ended chan struct{}
}

// followContainer copies the log of the container to log, and detects the end of the container.
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

	container := &container{name, make(chan struct{})}
	go func() {
		defer close(container.ended)
		_ = wait.Wait()
		_ = cmd.Wait()
	}()
	return container, nil
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
