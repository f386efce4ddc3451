import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.util.List;
import org.apache.beam.model.pipeline.v1.Endpoints.ApiServiceDescriptor;
import org.apache.beam.model.pipeline.v1.RunnerApi.Pipeline;
import org.apache.beam.runners.flink.FlinkJobInvoker;
import org.apache.beam.runners.flink.FlinkJobServerDriver;
import org.apache.beam.runners.flink.FlinkJobServerDriver.FlinkServerConfiguration;
import org.apache.beam.runners.flink.FlinkPipelineOptions;
import org.apache.beam.runners.flink.FlinkPipelineRunner;
import org.apache.beam.runners.jobsubmission.JobInvocation;
import org.apache.beam.runners.jobsubmission.JobServerDriver;
import org.apache.beam.runners.jobsubmission.PortablePipelineRunner;
import org.apache.beam.sdk.fn.server.GrpcContextHeaderAccessorProvider;
import org.apache.beam.sdk.fn.server.ServerFactory;
import org.apache.beam.sdk.io.FileSystems;
import org.apache.beam.sdk.options.PipelineOptionsFactory;
import org.apache.beam.vendor.grpc.v1p60p1.io.grpc.BindableService;
import org.apache.beam.vendor.grpc.v1p60p1.io.grpc.Server;
import org.apache.beam.vendor.grpc.v1p60p1.io.grpc.ServerInterceptors;
import org.apache.beam.vendor.grpc.v1p60p1.io.grpc.netty.NettyServerBuilder;
import org.apache.beam.vendor.guava.v32_1_2_jre.com.google.common.util.concurrent.ListeningExecutorService;

/**
 * Beam's job server for a Flink on the same machine, with two differences: it listens on the
 * loopback interface only, where Beam's own listens on all, and it sends no jars along with a job,
 * because this Flink has Beam on its class path (150 MB per job otherwise).
 *
 * <p>Takes the arguments of Beam's, prints its address when it is ready, and runs until it is told
 * to end. Java compiles this file when it starts it.
 */
public final class JobServer extends JobServerDriver {

  private JobServer(FlinkServerConfiguration configuration) {
    super(configuration, new Loopback(), new Loopback(), () -> new Invoker(configuration));
  }

  /** Starts the server. */
  public static void main(String[] arguments) throws Exception {
    FileSystems.setDefaultPipelineOptions(PipelineOptionsFactory.create());
    JobServer server = new JobServer(FlinkJobServerDriver.parseArgs(arguments));
    System.out.println(server.start());
    Thread.currentThread().join();
  }

  private static final class Invoker extends FlinkJobInvoker {
    Invoker(FlinkServerConfiguration configuration) {
      super(configuration);
    }

    @Override
    protected JobInvocation createJobInvocation(
        String invocationId,
        String retrievalToken,
        ListeningExecutorService executor,
        Pipeline pipeline,
        FlinkPipelineOptions options,
        PortablePipelineRunner ignored) {
      PortablePipelineRunner runner = new FlinkPipelineRunner(options, null, List.of());
      return super.createJobInvocation(
          invocationId, retrievalToken, executor, pipeline, options, runner);
    }
  }

  private static final class Loopback extends ServerFactory {
    @Override
    public Server allocateAddressAndCreate(
        List<BindableService> services, ApiServiceDescriptor.Builder descriptor)
        throws IOException {
      Server server = start(services, 0);
      descriptor.setUrl("localhost:" + server.getPort());
      return server;
    }

    @Override
    public Server create(List<BindableService> services, ApiServiceDescriptor descriptor)
        throws IOException {
      String url = descriptor.getUrl();
      return start(services, Integer.parseInt(url.substring(url.lastIndexOf(':') + 1)));
    }

    private static Server start(List<BindableService> services, int port) throws IOException {
      InetSocketAddress address = new InetSocketAddress(InetAddress.getByName("localhost"), port);
      NettyServerBuilder builder =
          NettyServerBuilder.forAddress(address).maxInboundMessageSize(Integer.MAX_VALUE);
      for (BindableService service : services) {
        builder.addService(
            ServerInterceptors.intercept(service, GrpcContextHeaderAccessorProvider.interceptor()));
      }
      return builder.build().start();
    }
  }
}
