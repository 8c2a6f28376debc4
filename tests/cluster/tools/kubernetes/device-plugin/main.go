// Command device-plugin offers an extended resource to a kubelet, as the shared RDMA device
// plugin does on a real node: a number of interchangeable devices of one name, and the same
// device files for each container that was given one.
//
// It is real where the tests look: registration, ListAndWatch, Allocate, health, and a new
// registration after the kubelet was restarted all go over the kubelet's own sockets. Only the
// device files are stand-ins, since the machine has no RDMA card.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Polling is how often files are looked at: the kubelet's socket, which it makes anew when it
// starts, and the file that names sick devices.
const polling = 200 * time.Millisecond

type plugin struct {
	v1beta1.UnimplementedDevicePluginServer

	resource  string
	count     int
	files     []*v1beta1.DeviceSpec
	sickNames string

	mu      sync.Mutex
	healthy chan struct{} // closed and replaced whenever the set of healthy devices changes
	sick    string
}

// Options asks the kubelet for nothing: no call before a container starts, no preference.
func (p *plugin) GetDevicePluginOptions(context.Context, *v1beta1.Empty) (*v1beta1.DevicePluginOptions, error) {
	return &v1beta1.DevicePluginOptions{}, nil
}

func (p *plugin) devices() ([]*v1beta1.Device, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	sick := map[string]bool{}
	for _, name := range strings.Fields(p.sick) {
		sick[name] = true
	}
	devices := make([]*v1beta1.Device, p.count)
	for i := range devices {
		devices[i] = &v1beta1.Device{ID: fmt.Sprintf("device-%d", i), Health: v1beta1.Healthy}
		if sick[devices[i].ID] || sick["all"] {
			devices[i].Health = v1beta1.Unhealthy
		}
	}
	return devices, p.healthy
}

func (p *plugin) ListAndWatch(_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse]) error {
	for {
		devices, changed := p.devices()
		if err := stream.Send(&v1beta1.ListAndWatchResponse{Devices: devices}); err != nil {
			return err
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-changed:
		}
	}
}

func (p *plugin) Allocate(_ context.Context, request *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	answer := &v1beta1.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		answer.ContainerResponses = append(answer.ContainerResponses, &v1beta1.ContainerAllocateResponse{
			// What a test reads inside the container to see which devices it was given.
			Envs:    map[string]string{"TESTBED_DEVICES": strings.Join(container.DevicesIds, ",")},
			Devices: p.files,
		})
		log.Printf("allocated %s", strings.Join(container.DevicesIds, ","))
	}
	return answer, nil
}

// WatchHealth reads the names of sick devices ("all", or IDs) from a file until ctx is done.
func (p *plugin) watchHealth(ctx context.Context) {
	for ctx.Err() == nil {
		text, err := os.ReadFile(p.sickNames)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			log.Printf("cannot read the names of sick devices: %v", err)
		}
		p.mu.Lock()
		if string(text) != p.sick {
			p.sick = string(text)
			close(p.healthy)
			p.healthy = make(chan struct{})
		}
		p.mu.Unlock()
		pause(ctx)
	}
}

// ServeOnce offers the devices until the kubelet's socket is replaced or ctx is done.
func (p *plugin) serveOnce(ctx context.Context, directory string) error {
	kubelet := filepath.Join(directory, "kubelet.sock")
	before, err := os.Stat(kubelet)
	if err != nil {
		return err
	}
	name := strings.ReplaceAll(p.resource, "/", "_") + ".sock"
	path := filepath.Join(directory, name)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	v1beta1.RegisterDevicePluginServer(server, p)
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	defer server.Stop()

	connection, err := grpc.NewClient("unix://"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	deadline, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err = v1beta1.NewRegistrationClient(connection).Register(deadline, &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: name, ResourceName: p.resource,
	})
	if err != nil {
		return fmt.Errorf("cannot register %s with the kubelet at %s: %w", p.resource, kubelet, err)
	}
	log.Printf("registered %d × %s", p.count, p.resource)
	for ctx.Err() == nil {
		select {
		case err := <-failed:
			return err
		default:
		}
		now, err := os.Stat(kubelet)
		// A file system gives a new file the number of one just removed, but not its time.
		if err != nil || !os.SameFile(before, now) || !now.ModTime().Equal(before.ModTime()) {
			return errors.New("the kubelet's socket was replaced")
		}
		pause(ctx)
	}
	return nil
}

func pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(polling):
	}
}

func main() {
	p := &plugin{healthy: make(chan struct{})}
	directory := flag.String("directory", v1beta1.DevicePluginPath, "the kubelet's folder of device plugin sockets")
	flag.StringVar(&p.resource, "resource", "rdma/hca_shared_devices_a", "name of the extended resource")
	flag.IntVar(&p.count, "count", 8, "number of devices")
	flag.StringVar(&p.sickNames, "sick", os.DevNull, "file with the IDs of unhealthy devices, or the word all")
	flag.Func("file", "HOST:CONTAINER, a device file each container gets (repeatable)", func(text string) error {
		host, container, found := strings.Cut(text, ":")
		if !found {
			return fmt.Errorf("found %q, expected HOST:CONTAINER", text)
		}
		p.files = append(p.files, &v1beta1.DeviceSpec{HostPath: host, ContainerPath: container, Permissions: "rw"})
		return nil
	})
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	go p.watchHealth(ctx)
	for ctx.Err() == nil {
		if err := p.serveOnce(ctx, *directory); err != nil {
			log.Print(err)
		}
		pause(ctx)
	}
}
